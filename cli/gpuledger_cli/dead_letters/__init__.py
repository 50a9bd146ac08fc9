"""`gpuledger dead-letters`: what could not be used, looked at and put back."""
