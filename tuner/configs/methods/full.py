"""Every weight is trained."""
