"""What a step may read and change beside its inputs: attributes, random streams, buffers; noted and given back."""
