"""WHICH LAYERS WHERE: layers, devices and links in; partition, placement and schedule out."""
