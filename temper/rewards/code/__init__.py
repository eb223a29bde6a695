"""Programs judged by hidden tests, behind the sandbox."""
