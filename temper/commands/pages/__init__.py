"""Pages of docs/ that are written from the code; `temper pages docs` writes all of them."""
