"""What fewer bits cost, and how weights get by with fewer."""
