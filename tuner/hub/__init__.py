"""What goes to the Hugging Face hub: may this user write there, and the upload. And what a plan needs from there."""
