"""The program that uses specvis_kernels: models, drafters, decoding loop, command line, training."""
