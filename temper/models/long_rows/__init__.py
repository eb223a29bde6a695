"""What long rows need: layer inputs that wait on the host, feed-forward layers computed in chunks of tokens."""
