"""The engine: what moves bytes between ranks, memory and storage. torch is imported only where tensors are touched."""
