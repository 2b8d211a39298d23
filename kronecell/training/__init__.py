"""Training: experiment files, the loop, run directories that resume, checkpoints, several processes."""
