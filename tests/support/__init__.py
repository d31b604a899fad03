"""What tests share: servers and processes as a person starts them, clients that look at them, and made-up data."""
