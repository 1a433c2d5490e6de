"""`reinforge view`: all runs of a folder in the browser, live, from this machine only, and without changing them."""
