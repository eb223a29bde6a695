"""Labelled responses and attacks that verifiers are measured on. The files are data; rows.py reads them."""
