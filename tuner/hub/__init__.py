"""What goes to the Hugging Face hub: whether this user may write there, and the upload."""
