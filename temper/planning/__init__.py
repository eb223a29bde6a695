"""Bytes and seconds of a stage before it runs, and settings that fit."""
