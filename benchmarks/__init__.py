"""Side by side: ckpt, torch's distributed checkpoint (DCP), torch.save, and plain writes and reads of the same bytes."""
