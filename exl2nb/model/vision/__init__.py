"""Seeing: from pixels to rows of the decoder's residual stream. Knows no requests and no text."""
