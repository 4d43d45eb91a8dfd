"""The HTTP gateway: bytes in, bytes out."""
