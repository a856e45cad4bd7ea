"""FID and CLIP score: quality of generated pictures, by networks in local files."""
