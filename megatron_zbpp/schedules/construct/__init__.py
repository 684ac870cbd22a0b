"""What several families are made with."""
