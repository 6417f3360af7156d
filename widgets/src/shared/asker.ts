// Requests from a slider to the kernel: one in flight at a time, the latest value wins, a lost answer is requested again.
export class Asker<Wish> {
  private wanted: Wish | null = null;
  private waiting = false;
  private timer: ReturnType<typeof setTimeout> | undefined;

  constructor(
    private readonly ask: (wish: Wish) => void,
    private readonly patienceMs = 1500,
  ) {}

  /** A question is on its way. */
  get asking(): boolean {
    return this.waiting;
  }

  want(wish: Wish): void {
    this.wanted = wish;
    if (!this.waiting) this.go();
  }

  /** The kernel answered. */
  answered(): void {
    this.waiting = false;
    clearTimeout(this.timer);
    if (this.wanted !== null) this.go();
  }

  close(): void {
    clearTimeout(this.timer);
  }

  private go(): void {
    if (this.wanted === null) return;
    const wish = this.wanted;
    this.wanted = null;
    this.ask(wish);
    this.waiting = true;
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.answered(), this.patienceMs);
  }
}
