"""What is used of the compiler: importing a file of this folder imports it."""
