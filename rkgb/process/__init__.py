"""What exists once in a process: its threads taking turns, and modes, profilers and compilers around a call."""
