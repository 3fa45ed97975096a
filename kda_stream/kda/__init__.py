"""What a KDA block must be. Pure: knows no file and no memory."""
