"""Floor 5: requests, the scheduler, the step loop on its own thread."""
