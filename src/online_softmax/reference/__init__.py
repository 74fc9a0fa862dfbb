"""The definition, in PyTorch operations: any device, any transform, no kernel."""
