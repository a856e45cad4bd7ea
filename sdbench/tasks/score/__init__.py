"""FID and CLIP score: how good drawn pictures are, by networks in local files."""
