"""Ways to train with less memory, ours and others', on the same models: what `against_peers.py` compares."""
