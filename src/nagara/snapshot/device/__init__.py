"""What of a replica lies on a device: saved through the driver, put back, refused with reasons."""
