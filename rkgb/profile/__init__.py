"""What the operations of a block take: times and bytes, measured on the device."""
