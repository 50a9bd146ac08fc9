"""`gpuledger doctor`: checks a running installation and prints what to do."""
