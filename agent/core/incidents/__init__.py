"""What happens to a GPU at an instant: XIDs, ECC errors, a lost GPU, a driver that was reloaded."""
