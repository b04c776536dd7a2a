"""Times and bytes of blocks, of the whole step, and of the device."""
