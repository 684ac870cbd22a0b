"""Training faces: what each technique does where its schedule trains, a file of its name."""
