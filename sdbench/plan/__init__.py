"""What will be done here: a request, this machine and these ranks become a plan."""
