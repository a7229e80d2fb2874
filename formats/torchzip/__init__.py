"""Archives that ``torch.save`` writes (.pt, .pth, .bin), read by ranges."""
