"""Variants for real: made from one model, held by processes of this host, asked over HTTP and gRPC."""
