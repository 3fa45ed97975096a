"""What a checkpoint's files say. Metadata only: no payload byte is read here."""
