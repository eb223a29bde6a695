"""What the command line does, one function per verb. Owns: the order of things. Refuses: parsing arguments (cli/)."""
