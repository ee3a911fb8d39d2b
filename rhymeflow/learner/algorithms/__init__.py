"""What is trained towards: advantages and losses, one file each."""
