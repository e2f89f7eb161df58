"""Those who lend machines: this machine, a person's scripts, clouds, and a simulated world."""
