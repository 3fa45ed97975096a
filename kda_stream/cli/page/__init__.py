"""The HTML pages of `inspect --html` and `stream --report`: one file each, and no network."""
