"""The arithmetic of layers and of the loss, written for speed on one kind of device."""
