"""What is measured and what is made of it: pure, without threads, clients or vendors."""
