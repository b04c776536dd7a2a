"""All that depends on the kind of device."""
