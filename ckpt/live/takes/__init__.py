"""One take of a sink, on one rank: its steps, what each gives to the next, and what is kept from take to take."""
