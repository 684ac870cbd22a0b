"""What a job asks for, and what does not go with it."""
