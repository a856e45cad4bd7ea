"""What will be done here: a request, a machine and its ranks become a plan."""
