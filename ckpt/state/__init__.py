"""Live PyTorch objects ⇄ named boxes of memory and plain values. The only room that knows classes of torch's modules and optimizers."""
