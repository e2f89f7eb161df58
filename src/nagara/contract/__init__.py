"""What the control process and a machine say to each other. Types only, no behaviour."""
