"""What earlier steps did not apply, and how it comes back."""
