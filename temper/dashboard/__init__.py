"""`temper watch`: a run, or many, on a page in the browser. Reads only; imports no torch, so that it starts at once."""
