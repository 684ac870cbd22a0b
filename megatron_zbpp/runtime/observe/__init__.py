"""What an iteration took: measured, put on one clock, written down."""
