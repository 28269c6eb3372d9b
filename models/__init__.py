"""Models built from the layers of flaxasync, one file each."""
